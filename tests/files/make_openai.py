"""Makes openai.jsonl: what the openai client sent, and what it understood of the answers.

Run with openai 3: `python tests/files/make_openai.py`. A server on loopback answers.
"""

# pyright: reportMissingImports=false, reportArgumentType=false

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

from openai import OpenAI

HERE = Path(__file__).parent
SENT: list[str] = []
CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "add", "arguments": '{"a": 2,  "b": 2.50}'},
}
ANSWERS: list[list[dict[str, Any]]] = [
    [{"message": {"role": "assistant", "content": None, "tool_calls": [CALL]}}],
    [
        {"message": {"role": "assistant", "content": "four ½"}},
        {"message": {"role": "assistant", "content": "five"}},
    ],
]


class Server(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        SENT.append(self.rfile.read(int(self.headers["Content-Length"])).decode())
        choices = [
            {
                "index": i,
                "finish_reason": "tool_calls" if "tool_calls" in c["message"] else "stop",
                "logprobs": None
                if "tool_calls" in c["message"]
                else {"content": [token("four"), token(" ½")][: len(choices_ids(i))]},
                **c,
            }
            | ({} if "tool_calls" in c["message"] else {"token_ids": choices_ids(i)})
            for i, c in enumerate(ANSWERS[len(SENT) - 1])
        ]
        answer = {
            "id": f"chatcmpl-{len(SENT)}",
            "object": "chat.completion",
            "created": 1700000000 + len(SENT),
            "model": "tiny",
            "choices": choices,
            "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
        }
        if len(SENT) == 2:
            answer["prompt_token_ids"] = [11, 12, 13]  # as vLLM does with return_token_ids
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def token(text: str) -> dict[str, Any]:
    return {"token": text, "logprob": -0.25, "bytes": list(text.encode()), "top_logprobs": []}


def choices_ids(i: int) -> list[int]:
    return [21, 22] if i == 0 else [23]


if __name__ == "__main__":
    server = HTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    client = OpenAI(api_key="none", base_url=f"http://127.0.0.1:{server.server_port}/v1")
    tools: Any = [
        {
            "type": "function",
            "function": {
                "name": "add",
                "parameters": {"type": "object", "properties": {"a": {"type": "number"}}},
            },
        }
    ]
    talk: list[Any] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "2+2.50="},
    ]
    first = client.chat.completions.create(model="tiny", messages=talk, tools=tools)
    asked = first.choices[0].message.to_dict(exclude_none=True)
    result = {"role": "tool", "tool_call_id": "call_1", "content": "4.50"}
    second = client.chat.completions.create(
        model="tiny", messages=[*talk, asked, result], tools=tools, n=2, temperature=0.7
    )
    lines = [
        f'{{"request": {sent}, "response": {got.to_json(indent=None)}}}\n'
        for sent, got in zip(SENT, (first, second), strict=True)
    ]
    (HERE / "openai.jsonl").write_text("".join(lines))
    server.shutdown()
