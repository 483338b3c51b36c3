"""OpenAI's chat API over policies, with every conversation recorded as turns.

A turn is recorded before its response ends. A session becomes rows when it ends: on request, on
feedback, when it is idle, or with the server. A conversation is then one row, since rows never
change. The modules that need FastAPI are imported by their own names, so that workflows can be
imported without the extra `serve`.
"""
