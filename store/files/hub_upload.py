"""Upload a folder to the Hugging Face hub."""

from pathlib import Path
from typing import Literal

from ..errors import ConfigError, StoreError, missing_extra

ROWS_FILE = "data/train-00000-of-00001.parquet"
"""Where a dataset's repository has its rows, so that `datasets` finds them."""


def push_folder(
    folder: Path, repository: str, kind: Literal["dataset", "model"], *, private: bool
) -> str:
    """Upload a folder as one commit, to a new repository if there is none; return its address.

    The token is that of `hf auth login`, or the variable HF_TOKEN. Files of the repository that the
    folder does not have stay. Raises ConfigError for a name that is none, StoreError if the hub
    refuses or cannot be reached; then the repository is as it was.
    """
    try:
        from httpx import HTTPError
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError
    except ImportError as error:
        raise missing_extra("huggingface_hub", "data") from error
    api = HfApi()
    try:
        made = api.create_repo(repository, repo_type=kind, private=private, exist_ok=True)
        api.upload_folder(
            repo_id=repository, folder_path=folder, repo_type=kind, commit_message="Upload by rlake"
        )
    except HFValidationError as error:
        raise ConfigError(
            f"`{repository}` is not a name of a repository: {error}; write `OWNER/NAME`"
        ) from error
    except (HfHubHTTPError, HTTPError, OSError) as error:
        reason = " ".join(str(error).split())[:500]
        raise StoreError(
            f"cannot push to `{repository}`: {reason}; log in with `hf auth login`, or set HF_TOKEN"
        ) from error
    return str(made)
