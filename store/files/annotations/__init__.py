"""Labels in files of annotation tools: read their labels, and write items to label."""

from collections.abc import Mapping

from . import argilla, label_studio, plain
from .format import AnnotationFormat, Asked, Given, answers, write

FORMATS: Mapping[str, AnnotationFormat] = {
    "label_studio": AnnotationFormat(label_studio.read, label_studio.write),
    "argilla": AnnotationFormat(argilla.read, argilla.write),
    "jsonl": AnnotationFormat(plain.read, plain.write),
}
"""All of them by name."""

__all__ = ["FORMATS", "AnnotationFormat", "Asked", "Given", "answers", "write"]
