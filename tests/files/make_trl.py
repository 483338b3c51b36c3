"""Makes trl_text/ and trl_chat/: what GRPOTrainer writes with `log_completions`.

Run with trl 1.16, datasets 5.2, transformers 5.19 and torch: `python tests/files/make_trl.py`.
"""

# pyright: reportMissingImports=false, reportArgumentType=false

import shutil
import tempfile
from pathlib import Path
from typing import Any

from datasets import Dataset
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

HERE = Path(__file__).parent
TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}<eos>"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def tokenizer() -> PreTrainedTokenizerFast:
    words = ["<pad>", "<eos>", "<unk>", "<user>", "<assistant>", "<system>", *"0123456789+="]
    raw = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Split(Regex(r"<\w+>|[\s\S]"), "isolated")
    raw.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=raw,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        chat_template=TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def text(completion: Any) -> str:
    return completion if isinstance(completion, str) else completion[0]["content"]


def ones(completions: list[Any], **_: Any) -> list[float]:
    return [text(c).count("1") / 4 for c in completions]


def even(completions: list[Any], **_: Any) -> list[float | None]:
    last = [text(c)[-1:] for c in completions]
    return [float(int(x) % 2 == 0) if x.isdigit() else None for x in last]


def write(name: str, prompts: list[Any]) -> None:
    tok = tokenizer()
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tok),
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=8,
            initializer_range=0.3,
            tie_word_embeddings=True,
            eos_token_id=tok.eos_token_id,
            pad_token_id=tok.pad_token_id,
        )
    )
    with tempfile.TemporaryDirectory() as folder:
        args = GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=4,
            num_generations=2,
            max_completion_length=4,
            max_steps=2,
            logging_steps=1,
            log_completions=True,
            report_to=[],
            use_cpu=True,
            save_strategy="no",
            seed=0,
        )
        trainer = GRPOTrainer(
            model=model,
            processing_class=tok,
            reward_funcs=[ones, even],
            args=args,
            train_dataset=Dataset.from_list([{"prompt": p} for p in prompts]),
        )
        trainer.train()
        written = sorted(Path(folder, "completions").glob("*.parquet"))
        shutil.copy(written[-1], HERE / f"{name}.parquet")


if __name__ == "__main__":
    sums = [f"{i}+{i}=" for i in range(4)]
    write("trl_text", sums)
    write("trl_chat", [[{"role": "user", "content": s}] for s in sums])
