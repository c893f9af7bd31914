import json

from fedmtl.training.local_method import LocalSettings, with_methods

from .small_client import DUAL, SINGLE, make_settings


def test_settings_survive_json():
    methods = {"proximal": 0.5, "smart": {"radius": 0.1}, "gradients": "pcgrad", "task_schedule": "joint"}
    settings = make_settings(SINGLE, DUAL, local_steps=3, betas=(0.8, 0.9), rates={"dual": 0.5}, **methods)
    assert set(settings.methods) == {"fedprox", "smart", "pcgrad"}
    assert LocalSettings.from_dict(json.loads(json.dumps(settings.to_dict()))) == settings


def test_a_task_without_its_own_rate_takes_the_common_one():
    settings = make_settings(SINGLE, DUAL, learning_rate=0.1, rates={"dual": 0.5})
    assert settings.learning_rates == {"single": 0.1, "dual": 0.5}


def test_task_weights_enter_the_loss_only_where_they_are_asked_to():
    weights = {"dual": 3.0}
    assert make_settings(SINGLE, DUAL, loss_weights=weights).loss_weights == {"single": 1.0, "dual": 3.0}
    averaging = make_settings(SINGLE, DUAL, loss_weights=weights, task_weight_in="averaging")
    assert averaging.loss_weights == {"single": 1.0, "dual": 1.0}


def test_settings_of_one_loss_have_the_given_methods_and_no_other():
    settings = make_settings(SINGLE, DUAL, proximal=0.5, task_schedule="joint", loss_weights={"dual": 3.0})
    alone = with_methods(settings, {"distillation": {"weight": 1.0}})
    assert alone.methods == {"distillation": {"weight": 1.0}}
    assert (alone.loss_weights, alone.task_schedule) == ({"single": 1.0, "dual": 1.0}, "even")
    assert with_methods(make_settings(SINGLE, task_schedule="annealed"), {}).task_schedule == "annealed"
