"""Evaluation: pass@k, best@k and mean reward of policies, with intervals and paired tests."""
