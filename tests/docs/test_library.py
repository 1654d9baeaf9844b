"""The programs in docs/library.md run as they stand."""

import re
from pathlib import Path
from typing import Any

from tests.models.tiny import tiny_model

PAGE = Path(__file__).parents[2] / "docs" / "library.md"


def test_the_programs_run() -> None:
    programs = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(programs) == 3
    names: dict[str, Any] = {"path": str(tiny_model("qwen3_5"))}
    for program in programs:
        exec(compile(program, str(PAGE), "exec"), names)
    assert [message["role"] for message in names["chat"].messages][-2:] == ["tool", "assistant"]
