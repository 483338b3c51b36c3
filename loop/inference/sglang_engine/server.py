"""One SGLang server: its requests, and what weights it has."""

import asyncio
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ....store.errors import ConfigError, JobError
from ...config.engines import SglangEngine as Settings
from ...models.rope import KEYS as ROPE
from ...models.rope import rope_of
from ..policy import PolicyError
from ..shared_tensors import SharedBlock
from .failures import BusyError, LostError
from .group import WeightGroup

if TYPE_CHECKING:
    import httpx

BUSY = 503
_DTYPES = {"half": "float16", "float": "float32"}
"""SGLang's other names of dtypes."""
_SIZES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "vocab_size", "tie_word_embeddings"),
)
"""What of a model's configuration decides the shapes of its weights."""


@dataclass(frozen=True, kw_only=True)
class Labeled:
    """Weights in a folder or in memory, and the label of the tokens that they sample."""

    label: str
    folder: Path | None = None
    block: SharedBlock | None = None


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
        self.epoch = 0
        """Rises when requests under way may go on with weights that their label does not say."""
        self.trouble: JobError | None = None
        """Why the last attempt to give it weights failed."""
        self.busy = 0
        """Requests under way."""
        self.max_length = 0
        """Most tokens of prompt and answer together."""
        self._is_incremental = False
        self._group = WeightGroup(self._url, self.name, settings, self._post)

    async def connect(self, folder: Path, *, dtype: str, trust: bool = False) -> None:
        """Look at what the server serves; with `trust`, code of the model is run.

        Raises ConfigError if it is not the model of the folder in this dtype, JobError if nothing
        answers.
        """
        info, model = await self._get("/server_info"), await self._get("/model_info")
        # Of its start: that of `/model_info` may be a folder of versions that is gone.
        path = str(info.get("model_path"))
        if not model.get("is_generation"):
            raise ConfigError(
                f"the server `{self.name}` serves `{path}`, which does not generate text; start "
                "it with the run's model"
            )
        if (room := info.get("max_req_input_len")) is None:
            raise ConfigError(
                f"the server `{self.name}` (SGLang {info.get('version')}) does not say "
                "`max_req_input_len`; update it, rlake is tested with SGLang 0.5.23"
            )
        # So many tokens can be scored too; SGLang keeps a few more for itself.
        self.max_length = int(room) - 1
        self._is_incremental = bool(info.get("incremental_streaming_output"))
        self._group.look_at(info)
        try:
            changed = json.loads(info.get("json_model_override_args") or "{}")
            ours, theirs, made_in = await asyncio.to_thread(
                _configs, folder, path, changed, trust=trust
            )
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"the configuration of `{path}`, which the server `{self.name}` serves, cannot be "
                f"read on this machine: {str(error)[:200]}; start the server with a path that is "
                f"the same on both: `--model-path {folder}`"
            ) from error
        # SGLang ends when it is given weights of other shapes, so they are compared before.
        for name, value in {**theirs, "model_type": model.get("model_type")}.items():
            if name not in ROPE and value is not None and ours.get(name) != value:
                raise ConfigError(
                    f"the server `{self.name}` serves `{path}` with `{name}` {value}, and the "
                    f"run's model has {ours.get(name)}; start it with the run's model: "
                    f"`--model-path {folder}`"
                )
        if (rope := {k: v for k in ROPE if (v := ours[k]) != theirs[k]}) and theirs[ROPE[0]]:
            raise ConfigError(
                f"the server `{self.name}` computes positions by "
                f"{ {k: theirs[k] for k in rope} }, and the run's model by {rope}; start it with "
                f"`--json-model-override-args '{json.dumps(rope)}'`"
            )
        given = str(info.get("dtype")).removeprefix("torch.")
        found = _DTYPES.get(given, given)
        if found == "auto":
            found = _resolved(made_in, str(model.get("model_type")))
        if found != dtype:
            raise ConfigError(
                f"the server `{self.name}` computes in {found}, and the run's `model.dtype` is "
                f"{dtype}; start it with `--dtype {dtype}`, or set `model.dtype` to {found}"
            )

    async def load(self, new: Labeled, before: Labeled) -> None:
        """Replace the weights between two tokens, and label the tokens that they sample.

        Requests under way go on with the new ones, and a KV cache that is computed anew. Raises
        JobError if the server refuses them, and then has those before; LostError if it does not
        answer.
        """
        if self.label is None:
            await self._group.leave()
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
            known, self.label = self.label, None
            if known is None:
                self.epoch += 1
            await self._post("/continue_generation", {})
            self.label = known

    async def _update(self, new: Labeled) -> None:
        if new.block is not None:
            await self._group.update(new.block, new.label)
        else:
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

        Raises PolicyError if the server refuses it, BusyError if it has no room, LostError if it
        does not answer.
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
        await self._group.leave()
        await self._http.aclose()

    async def reach(self) -> None:
        """Raise LostError if the server does not answer."""
        await self._get("/model_info")

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
                        error = last["error"]
                        if isinstance(error, dict) and error.get("code") == BUSY:
                            raise self._busy(error)
                        raise PolicyError(f"the server `{self.name}` answers: {error}")
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

    def _busy(self, why: object) -> BusyError:
        return BusyError(f"the server `{self.name}` has no room: {str(why)[:200]}")

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
        why = found.get("error", found) if isinstance(found, dict) else found
        why = why.get("message", why) if isinstance(why, dict) else why
        status = response.status_code
        # What stands before a server says the last two when the server is gone.
        if status in (502, 504) or (status >= 500 and response.request.method == "GET"):
            raise self._lost(path, JobError(f"{status} {why}"))
        if status == BUSY and path == "/generate":
            raise self._busy(why)
        if status in (401, 403):
            raise ConfigError(
                f"the server `{self.name}` refuses the key; set `{self._settings.api_key_env}`"
            )
        if status == 404:
            raise ConfigError(
                f"the server `{self.name}` has no {path}; start SGLang there, 0.5.23 or newer"
            )
        raise refused(f"the server `{self.name}` refuses {path}: {str(why)[:500]}")


def _configs(
    folder: Path, served: str, changed: Mapping[str, Any], *, trust: bool
) -> tuple[dict[str, Any], dict[str, Any], str | None]:
    """Return the sizes of the run's model and of the served one, and the dtype that it names.

    `changed` are the keys of its configuration with which the server was started.
    """
    from transformers import AutoConfig

    ours, theirs = (
        AutoConfig.from_pretrained(one, local_files_only=True, trust_remote_code=trust)
        for one in (str(folder), served)
    )
    first, second = (
        {name: getattr(one.get_text_config(), name, None) for name in _SIZES}
        for one in (ours, theirs)
    )
    theirs.update(dict(changed))
    first, second = first | rope_of(ours), second | rope_of(theirs)
    named = getattr(theirs, "dtype", None)
    return {"model_type": ours.model_type, **first}, second, named and str(named)


def _resolved(named: str | None, model_type: str) -> str:
    """Return the dtype of `--dtype auto`, as SGLang 0.5.23 resolves it."""
    named = (named or "float32").removeprefix("torch.")
    if named != "float32":
        return named
    return "bfloat16" if model_type.startswith("gemma") else "float16"
