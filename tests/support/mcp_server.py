"""A small MCP server over its streams, or over HTTP at a socket whose descriptor it is given."""

import os
import sys
import time
from pathlib import Path

import uvicorn
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
        uvicorn.run(server.streamable_http_app(), fd=int(sys.argv[1]))
    else:
        server.run()
