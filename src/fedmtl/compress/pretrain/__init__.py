"""Pretraining a small encoder: TinyBERT's general distillation, with a new vocabulary for the student."""
