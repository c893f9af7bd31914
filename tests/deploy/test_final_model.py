import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fedmtl import Run
from fedmtl.config.file import load_config
from fedmtl.deploy.final_model import FinalSite, final_frames, save_final_model
from fedmtl.deploy.site_worker import SiteSettings
from fedmtl.engines.flower.calls import ModelCall
from fedmtl.errors import ModelError
from fedmtl.export.card import model_card
from fedmtl.federation.client import InitialValues, Site, save_state
from fedmtl.model.multitask import open_model
from fedmtl.sharing.plan import Key, SharingPlan
from fedmtl.sharing.weights import initial_weights
from fedmtl.tasks.load import known_tasks
from small_config import SMALL

SHARED = SharingPlan((("heads.*", "task"), ("*", "all")))
PERSONAL = SharingPlan((("heads.*", "client"), ("*", "all")))


@pytest.fixture(scope="module")
def opened():
    config = load_config(None, SMALL)
    encoder, model = open_model(config.model, known_tasks(config), 0)
    return config, encoder, model


class Meeting:
    """A server's end of a run, and the site `clinic` with the task `sentiment`."""

    def __init__(self, opened, plan, folder: Path) -> None:
        config, encoder, self.model = opened
        canonical = self.model.canonical()
        values = {Key("", name): getattr(part, leaf).detach() for name, (part, leaf) in canonical.items()}
        settings = SiteSettings("clinic", ("sentiment",), folder, folder, save_model=folder / "saved")
        site = Site(self.model, InitialValues(values), None, None, folder / "run", torch.device("cpu"))
        self.final = FinalSite(site, encoder, config, settings, 1 << 30)
        weights = {key: value + 0.25 for key, value in initial_weights(self.model, plan).items()}
        self.state = SimpleNamespace(plan=plan, weights=weights, round=3, accepted={"clinic": 2}, progress={})
        server = SimpleNamespace(names=list(canonical), tasks=self.model.tasks)
        self.prepared = SimpleNamespace(server=server, config=config)
        self.file = folder / "frame"

    def send(self, tasks=("sentiment",)):
        frames = final_frames(self.prepared, self.state, None, {"clinic": tasks})
        about, frame = frames("clinic")
        self.file.write_bytes(bytes(frame))
        return ModelCall("", self.file, about)

    def saved(self) -> list[str]:
        return sorted(path.name for path in self.file.parent.iterdir() if path.name not in ("frame", "run"))


def test_a_site_saves_the_model_of_its_tasks_as_a_run_that_answers(opened, tmp_path):
    met = Meeting(opened, SHARED, tmp_path)
    words = save_final_model(met.final, met.send())
    assert "the model of sentiment is in" in words
    run = Run(tmp_path / "saved")
    loaded = run.model()
    assert loaded.tasks == ("sentiment",)
    assert all(torch.equal(value, met.state.weights[key]) for key, value in loaded.saved.weights.items())
    assert [answer.task for answer in run.predict("a fine film")] == ["sentiment"]
    assert "saved at a site" in model_card(run.folder, "")


def test_a_personal_head_comes_from_the_sites_folder(opened, tmp_path):
    met = Meeting(opened, PERSONAL, tmp_path)
    heads = {key: value for key, value in met.state.weights.items() if key.name.startswith("heads.")}
    assert not heads, "a server has no personal values"
    own = {
        Key("client:clinic", f"heads.sentiment.{leaf}"): torch.full(shape, 0.5)
        for leaf, shape in (("weight", (2, 32)), ("bias", (2,)))
    }
    with pytest.raises(ModelError, match="this site has no values of its own after round 3"):
        save_final_model(met.final, met.send())
    save_state(tmp_path / "run" / "clinic", 2, {"values": own}, 0)
    save_final_model(met.final, met.send())
    saved = Run(tmp_path / "saved").model().saved.weights
    assert torch.equal(saved[Key("task:sentiment", "heads.sentiment.weight")], torch.full((2, 32), 0.5))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda met: met.send(), None),
        (lambda met: ModelCall("", met.send().frame, json.dumps({"sha256": "0" * 64})), "have the SHA-256"),
        (lambda met: ModelCall("", met.send().frame, "no words"), "names no SHA-256"),
        (lambda met: met.send(("sentiment", "paraphrase")), "of another site or of other tasks"),
        (lambda met: (met.state.weights.update(_broken(met)), met.send())[1], "another shape, or is not finite"),
    ],
)
def test_a_model_that_is_not_the_servers_is_refused_and_nothing_is_left(opened, tmp_path, change, reason):
    met = Meeting(opened, SHARED, tmp_path)
    call = change(met)
    if reason is None:
        save_final_model(met.final, call)
        assert met.saved() == ["saved"]
        return
    with pytest.raises(ModelError, match=reason):
        save_final_model(met.final, call)
    assert met.saved() == []


def _broken(met):
    key = Key("task:sentiment", "heads.sentiment.bias")
    return {key: torch.full_like(met.state.weights[key], float("nan"))}
