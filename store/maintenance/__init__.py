"""Care: files merged, indexes kept up, old versions and forgotten rows removed."""

from .maintain import GRACE_SECONDS, maintain
from .report import Report

__all__ = ["GRACE_SECONDS", "Report", "maintain"]
