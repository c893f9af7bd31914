"""Trackers take a run's events to where a team has its numbers: TensorBoard, MLflow, Weights & Biases, Trackio."""
