"""One SGLang server: its requests, and what weights it has."""

import asyncio
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from ....store.errors import ConfigError, JobError
from ...config.engines import SglangEngine as Settings
from ..policy import PolicyError

if TYPE_CHECKING:
    import httpx

AGAIN_SECONDS = 0.5
"""Time between two attempts to reach a server."""
_SIZES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "vocab_size", "tie_word_embeddings"),
)
"""What of a model's configuration decides the shapes of its weights."""


class LostError(JobError):
    """A server did not answer, and may have other weights from now on."""


@dataclass(frozen=True)
class Labeled:
    """A folder of weights, and the label of the tokens that they sample."""

    folder: Path
    label: str


class Server:
    """A client of one server, bound to the event loop in which it is used."""

    def __init__(self, url: str, settings: Settings) -> None:
        """Connect to an address. Raises ConfigError for a key that is not plain text."""
        import httpx

        # The name goes into messages, so it must not hold secrets of the URL.
        public = httpx.URL(url).copy_with(userinfo=b"", query=None, fragment=None)
        self.name = str(public).rstrip("/")
        self._url, self._settings = url.rstrip("/"), settings
        key = os.environ.get(settings.api_key_env, "").strip()
        if not key.isascii() or not key.isprintable():
            raise ConfigError(
                f"the key in the environment's `{settings.api_key_env}` is not plain text; set it "
                "to the server's key"
            )
        self._http = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(None, connect=10.0),
            limits=httpx.Limits(max_connections=None),
        )
        self.label: str | None = None
        """The label of the weights that it has; None: unknown."""
        self.changing = asyncio.Lock()
        self.busy = 0
        """Requests under way."""
        self.max_length = 0
        """Most tokens of prompt and answer together."""
        self._is_incremental = False

    async def connect(self, folder: Path) -> None:
        """Look at what the server serves.

        Raises ConfigError if it is not the model of the folder, JobError if nothing answers.
        """
        info, model = await self._get("/server_info"), await self._get("/model_info")
        if not model.get("is_generation"):
            raise ConfigError(
                f"the server `{self.name}` serves `{model.get('model_path')}`, which does not "
                "generate text; start it with the run's model"
            )
        if (room := info.get("max_req_input_len")) is None:
            raise ConfigError(
                f"the server `{self.name}` (SGLang {info.get('version')}) does not say "
                "`max_req_input_len`; update it, rlake is tested with SGLang 0.5.23"
            )
        # So many tokens can be scored too; SGLang keeps a few more for itself.
        self.max_length = int(room) - 1
        self._is_incremental = bool(info.get("incremental_streaming_output"))
        ours, theirs = await asyncio.to_thread(_configs, folder, str(model.get("model_path")))
        # SGLang ends when it is given weights of other shapes, so they are compared before.
        for name, value in {**theirs, "model_type": model.get("model_type")}.items():
            if value is not None and ours.get(name) != value:
                raise ConfigError(
                    f"the server `{self.name}` serves `{model.get('model_path')}` with `{name}` "
                    f"{value}, and the run's model has {ours.get(name)}; start it with the run's "
                    f"model: `--model-path {folder}`"
                )

    async def load(self, new: Labeled, before: Labeled) -> None:
        """Replace the weights between two tokens, and label the tokens that they sample.

        Requests under way go on with the new ones, and a KV cache that is computed anew. Raises
        JobError if the server refuses them, and then has those before; LostError if it does not
        answer.
        """
        self.label = None
        await self._post("/pause_generation", {"mode": "retract"})
        try:
            await self._update(new)
        except LostError:
            raise
        except JobError:
            # A failed update leaves whatever weights under the old label.
            if before is not new:
                await self._update(before)
            raise
        finally:
            await self._post("/continue_generation", {})

    async def _update(self, new: Labeled) -> None:
        body = {"model_path": str(new.folder), "weight_version": new.label, "flush_cache": True}
        await self._post("/update_weights_from_disk", body)
        self.label = new.label

    async def check_labels(self, label: str) -> None:
        """Raise ConfigError if the server does not label the tokens that it samples."""
        params = {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True}
        body = {"input_ids": [0], "sampling_params": params, "return_logprob": True}
        meta = (await self.generate(body)).get("meta_info", {})
        spans = meta.get("weight_versions") or []
        if [span.get("version") for span in spans] != [label]:
            raise ConfigError(
                f"the server `{self.name}` does not say which weights sampled a token: "
                f"`weight_versions` is {spans or 'missing'}; update it, rlake is tested with "
                "SGLang 0.5.23"
            )

    async def generate(
        self, body: Mapping[str, Any], *, on_tokens: Callable[[list[int]], None] | None = None
    ) -> dict[str, Any]:
        """Return the answer to a request; `on_tokens` gets its tokens while they are sampled.

        Raises PolicyError if the server refuses it, LostError if it does not answer.
        """
        self.busy += 1
        try:
            if on_tokens is None:
                return await self._post("/generate", body, refused=PolicyError)
            return await self._streamed(body, on_tokens)
        finally:
            self.busy -= 1

    async def abort(self, rid: str) -> None:
        """End a request, which is answered with the tokens so far."""
        await self._post("/abort_request", {"rid": rid})

    async def close(self) -> None:
        """Close connections."""
        await self._http.aclose()

    async def reach(self) -> None:
        """Wait until the server answers. Raises LostError after the restart timeout."""
        seconds = self._settings.restart_timeout
        deadline = monotonic() + seconds
        while True:
            try:
                await self._get("/model_info")
            except LostError as error:
                if monotonic() >= deadline:
                    raise LostError(
                        f"{error}; it was waited for {seconds:g} s (`restart_timeout`); look at "
                        "its log, and start it again"
                    ) from None
                await asyncio.sleep(AGAIN_SECONDS)
            else:
                return

    async def _streamed(
        self, body: Mapping[str, Any], on_tokens: Callable[[list[int]], None]
    ) -> dict[str, Any]:
        import httpx

        tokens: list[int] = []
        logprobs: list[Any] = []
        top: list[Any] = []
        last: dict[str, Any] = {}
        try:
            sent = {**body, "stream": True}
            async with self._http.stream("POST", f"{self._url}/generate", json=sent) as response:
                if response.is_error:
                    self._check(response, await response.aread(), "/generate", PolicyError)
                async for line in response.aiter_lines():
                    if not line.startswith("data:") or line == "data: [DONE]":
                        continue
                    last = json.loads(line.removeprefix("data:"))
                    if "error" in last:
                        raise PolicyError(f"the server `{self.name}` answers: {last['error']}")
                    meta = last["meta_info"]
                    old = 0 if self._is_incremental else len(tokens)
                    new = last["output_ids"][old:]
                    tokens += new
                    logprobs += meta["output_token_logprobs"][old:]
                    top += (meta.get("output_top_logprobs") or [])[old:]
                    if new:
                        on_tokens(new)
        except (httpx.TransportError, ValueError, KeyError) as error:
            raise self._lost("/generate", error) from None
        meta = last.get("meta_info", {})
        if meta.get("finish_reason") is None:
            raise LostError(f"the server `{self.name}` ended an answer before its end")
        meta |= {"output_token_logprobs": logprobs, "output_top_logprobs": top}
        return {**last, "output_ids": tokens, "meta_info": meta}

    async def _get(self, path: str) -> dict[str, Any]:
        return await self._send("GET", path, None, JobError)

    async def _post(
        self, path: str, body: Mapping[str, Any], *, refused: type[JobError] = JobError
    ) -> dict[str, Any]:
        return await self._send("POST", path, body, refused)

    async def _send(
        self, method: str, path: str, body: Mapping[str, Any] | None, refused: type[JobError]
    ) -> dict[str, Any]:
        import httpx

        try:
            async with asyncio.timeout(self._settings.request_timeout):
                response = await self._http.request(method, self._url + path, json=body)
        except TimeoutError:
            seconds = self._settings.request_timeout
            raise LostError(
                f"the server `{self.name}` did not answer {path} in {seconds:g} s; look at its "
                "log, or raise `request_timeout`"
            ) from None
        except httpx.TransportError as error:
            raise self._lost(path, error) from None
        return self._check(response, response.content, path, refused)

    def _lost(self, path: str, error: Exception) -> LostError:
        why = str(error)[:200] or type(error).__name__
        return LostError(f"the server `{self.name}` did not answer {path}: {why}")

    def _check(
        self, response: "httpx.Response", content: bytes, path: str, refused: type[JobError]
    ) -> dict[str, Any]:
        """Return the JSON of an answer; raise `refused` with the server's reason."""
        try:
            found = json.loads(content)
        except ValueError:
            found = {"message": content.decode(errors="replace")[:300]}
        if response.is_success and isinstance(found, dict) and found.get("success", True):
            return found
        if response.status_code >= 500:
            raise LostError(f"the server `{self.name}` answers {path} with {response.status_code}")
        if response.status_code in (401, 403):
            raise ConfigError(
                f"the server `{self.name}` refuses the key; set `{self._settings.api_key_env}`"
            )
        if response.status_code == 404:
            raise ConfigError(
                f"the server `{self.name}` has no {path}; start SGLang there, 0.5.23 or newer"
            )
        why = found.get("error", found) if isinstance(found, dict) else found
        why = why.get("message", why) if isinstance(why, dict) else why
        raise refused(f"the server `{self.name}` refuses {path}: {str(why)[:500]}")


def _configs(folder: Path, served: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the sizes of the run's model, and those of the served one where they can be read."""
    from transformers import AutoConfig

    ours: Any = AutoConfig.from_pretrained(str(folder))
    try:
        theirs: Any = AutoConfig.from_pretrained(served, local_files_only=True)
    # A folder of another machine, or a model of the hub that was never loaded here.
    except (OSError, ValueError):
        return {"model_type": ours.model_type}, {}
    sizes = (
        {name: getattr(one.get_text_config(), name, None) for name in _SIZES}
        for one in (ours, theirs)
    )
    first, second = sizes
    return {"model_type": ours.model_type, **first}, second
