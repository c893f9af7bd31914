"""A site's two processes: this one has the line to the server, the worker it starts has the text and the model."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable

from fedmtl.deploy.site_check import check_files
from fedmtl.deploy.site_worker import SiteSettings, start_site
from fedmtl.engines.flower.addresses import Address
from fedmtl.engines.flower.audit import Audit
from fedmtl.engines.flower.line import Line, SiteKeys
from fedmtl.engines.flower.site_service import serve_site
from fedmtl.engines.processes import WorkerPool, raised
from fedmtl.errors import FedmtlError
from fedmtl.runs.energy import Meter, energy_words, total_energy
from fedmtl.runs.folder import locked, make_private_folder

# Before the server's welcome says otherwise.
MAX_BYTES = 1 << 36


class Ended(FedmtlError):
    """The site's owner ended it by a signal."""

    def __init__(self, number: int) -> None:
        super().__init__(f"ended by {signal.Signals(number).name}; start it again to take part again")
        self.exit_code = 128 + number


def join_run(settings: SiteSettings, address: Address, keys: SiteKeys | None, say: Callable[[str], None]) -> None:
    """Take part until the run is over."""
    make_private_folder(settings.folder)
    make_private_folder(settings.spool)
    # Two sites of one folder would write each other's values.
    with locked(settings.folder), raised(Ended):
        audit = Audit(settings.folder)
        line = Line(address, keys, settings.spool, MAX_BYTES, say)
        pool = WorkerPool(start_site, settings, 1)
        try:
            say(f"tasks {', '.join(settings.tasks)}, server {address}")
            say(settings.policy.words())
            check_files(pool, settings, say, audit)
            meter = Meter()
            meter.watch(settings.device)
            try:
                wants = settings.save_model is not None
                words = serve_site(line, pool, say, audit, settings.client, wants_model=wants)
            finally:
                spent = total_energy([meter.take()])
                assert spent is not None, "there is an event"
                # For this terminal only: nothing of it is sent.
                say(f"energy of this site: {energy_words(spent)}")
                meter.close()
            say(words)
        finally:
            pool.close()
            shutil.rmtree(settings.spool, ignore_errors=True)
