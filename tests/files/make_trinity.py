"""Makes trinity.db with Trinity-RFT 0.6.0's own tables and blobs.

Run with torch, safetensors, sqlalchemy, aiosqlite and ray, and trinity-rft without what it needs
more: `python tests/files/make_trinity.py`.
"""

# pyright: reportMissingImports=false, reportArgumentType=false

import asyncio
import pickle
from pathlib import Path

import numpy as np
import torch
from sqlalchemy.ext.asyncio import AsyncSession
from trinity.buffer.schema.sql_schema import init_async_engine
from trinity.common.experience import EID, Experience

HERE = Path(__file__).parent


def experiences() -> list[Experience]:
    talk = [{"role": "user", "content": "2+2="}, {"role": "assistant", "content": "4"}]
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    return [
        Experience(
            eid=EID(batch=3, task=0, run=0, suffix="aaaaaa"),
            tokens=[5, 6, 7, 8, 9],
            prompt_length=3,
            logprobs=[-0.5, -0.25],
            reward=1.0,
            advantages=[0.75, 0.75],
            returns=[0.75, 0.75],
            info={"model_version": 4, "use_count": 0},
            metrics={"accuracy": 1.0},
            prompt_text="2+2=",
            response_text="4",
        ),
        Experience(
            eid=EID(batch=3, task=0, run=1, suffix="bbbbbb"),
            tokens=[5, 6, 7, 8, 9, 10],
            prompt_length=2,
            logprobs=[-0.5, 0.0, -0.25, -1.0],
            reward=0.0,
            action_mask=[True, False, True, True],
            token_level_reward=[0.0, 0.0, 0.0, 1.0],
            teacher_logprobs=[-0.1, -0.2, -0.3, -0.4],
            info={"model_version": 5},
            messages=talk,
            tools=tools,
        ),
        Experience(
            eid=EID(batch=3, task=1, run=0, suffix="cccccc"),
            tokens=[1, 2, 3],
            prompt_length=1,
            logprobs=[-0.5, -0.5],
            reward=None,
            info={"model_version": 5, "score": np.float64(0.5)},  # needs a program to be read
            prompt_text="never read",
            response_text="never read",
        ),
    ]


async def write(path: Path) -> None:
    path.unlink(missing_ok=True)
    engine, meta, blob = await init_async_engine(f"sqlite:///{path}", "rollouts", "experience")
    async with AsyncSession(engine) as session:
        for made in experiences():
            row = meta.from_experience(made)
            session.add(row)
            await session.flush()
            session.add(blob(id=row.id, experience_bytes=made.serialize()))
        older = experiences()[0]
        row = meta.from_experience(older)
        session.add(row)
        await session.flush()
        session.add(blob(id=row.id, experience_bytes=pickle.dumps(older)))
        await session.commit()
    await engine.dispose()


if __name__ == "__main__":
    torch.manual_seed(0)
    asyncio.run(write(HERE / "trinity.db"))
