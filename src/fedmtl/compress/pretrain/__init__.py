"""Pretraining a small encoder of one's own: TinyBERT's general distillation, with a vocabulary of the student's own."""
