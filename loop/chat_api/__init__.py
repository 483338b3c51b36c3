"""Serving: OpenAI's chat API over policies, with every conversation recorded as rows.

A turn is on the disk, in a journal, before its answer ends. A session becomes rows when it ends:
asked to, by feedback on it, after a rest, or with the server; a conversation is then one row, since
facts do not change and a row cannot grow. What a killed server answered, the next one stores.

Rows have the source `served` and the run `NAME:serve`, and need nothing else to be trained on:

    trainer:
      where: source = 'served'
      side_columns: ["reward=feedback:score"]
"""

from .app import create_app
from .sessions import NullSink, Session, Sessions, Sink

__all__ = ["NullSink", "Session", "Sessions", "Sink", "create_app"]
