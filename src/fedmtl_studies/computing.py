"""What the studies use of fedmtl that loads torch or numpy; import it inside the functions that compute.

The processes of cells are forked from one that has imported this module.
"""

from __future__ import annotations

from fedmtl.compress.distill.run import distill
from fedmtl.compress.measure.process import peak_bytes
from fedmtl.compress.measure.variants import measure
from fedmtl.compress.prune import prune_run
from fedmtl.compress.quantize import Quantization, needs_reduced_range, quantize
from fedmtl.experiment.prepare import open_engine
from fedmtl.experiment.run import resume_run, start_run
from fedmtl.export.onnx import export_onnx
from fedmtl.federation.messages import Update
from fedmtl.model.multitask import BoundModel
from fedmtl.predict.answers import labelled_sets
from fedmtl.predict.onnx import OnnxModel, compute, feeds, open_onnx
from fedmtl.predict.run import load_run
from fedmtl.tasks.batches import TextShard
from fedmtl.tasks.load import TaskData, load_tasks
from fedmtl.tasks.metrics import Scores, score, sum_predictions
from fedmtl.tasks.resolve import resolve_task
from fedmtl.tasks.tokens import encode_texts
from fedmtl.training.local import predict_together
