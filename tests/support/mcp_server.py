"""A small MCP server: `python mcp_server.py` speaks over its streams, with a port over HTTP."""

import os
import sys
import time
from pathlib import Path

from mcp.server.mcpserver import MCPServer

server = MCPServer("small")


@server.tool()
def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


@server.tool()
def breaks() -> str:
    """Never works."""
    raise ValueError("no disk")


@server.tool()
def process() -> str:
    """Say which process this is."""
    return str(os.getpid())


@server.tool()
def dies() -> str:
    """End the process in the midst of a call."""
    os._exit(3)


@server.tool()
def hangs(path: str) -> str:
    """Take as long as a file is there."""
    while Path(path).exists():
        time.sleep(0.01)
    return "at last"


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run()
