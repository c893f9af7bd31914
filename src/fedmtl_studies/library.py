"""Everything that the studies use of fedmtl, but for what loads torch or numpy, which is in `computing`.

Of this package only these two modules and `cli` import fedmtl, so that a change of the library is followed here alone.
"""

from __future__ import annotations

from fedmtl import __version__
from fedmtl.capabilities import AGGREGATORS
from fedmtl.compress.augment.settings import AugmentSettings, parse_copies
from fedmtl.compress.cut import Cut
from fedmtl.compress.distill.settings import DistillSettings, LossWeights
from fedmtl.compress.measure.measured import Load, Measured, Teacher, Timing, Variant
from fedmtl.config import Config, WireConfig
from fedmtl.config.file import config_from, load_config, with_absolute_paths, with_overrides
from fedmtl.config.honoured import EVERY, ONLY_SERVER, Honours
from fedmtl.config.yaml_text import parse_yaml, write_yaml
from fedmtl.engines.processes import raised, warm_up
from fedmtl.engines.start_up import ENCODER_CODE, ENGINE, GPU, worker_imports
from fedmtl.errors import CannotContinue, ConfigError, DataError, FedmtlError, RunNotFound
from fedmtl.foreign import printable
from fedmtl.model.encoder_files import encoder_folder
from fedmtl.report.charts import Bar, Frame, bar_chart, bar_range, padded, svg, x_axis, y_axis
from fedmtl.report.formats import MISSING, change, count, duration, percent, score, size
from fedmtl.report.markup import Html, join, legend, notes, notices, tag
from fedmtl.report.markup import table as html_table
from fedmtl.report.page import write_report
from fedmtl.report.single_page import TABLE_STYLE, single_page
from fedmtl.report.single_page import write_svg as write_svg_file
from fedmtl.report.variants_plot import PLOT_STYLE, variants_plot
from fedmtl.runs.event_lines import Event as RunEvent
from fedmtl.runs.event_lines import first_of, last_of
from fedmtl.runs.events import (
    ClientsEvent,
    DataEvent,
    EndEvent,
    EvaluationEvent,
    PlanEvent,
    PruningEvent,
    RoundEvent,
    StartEvent,
    UpdateEvent,
)
from fedmtl.runs.folder import RunFolder, create_run, find_run, write_atomic
from fedmtl.runs.log import read_events
from fedmtl.runs.summary import summarize
from fedmtl.tasks.builtin import BUILTIN
from fedmtl.tasks.embedded import ADJECTIVES, INTENSIFIERS, NOUNS, PEOPLE, VERBS, embedded_columns
from fedmtl.tasks.sources import Table as DataTable
from fedmtl.tasks.sources import find_table, read_table
