"""The demo model's greedy answer on the device against the CPU backend's, token by token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from device_check.stages import stage_main
from strata.config import Override, load_config
from strata.core import Request, SamplingParams
from strata.interfaces.models import open_model

DEMO = str(Path(__file__).parents[2] / "configs" / "demo.yaml")
QUESTIONS = ("What is the capital of France?", "Who are you?", "What is the capital of Samoa?")
FEW_SLOTS = ("experts.slots=40", "experts.misses=fetch")


def answers(settings: tuple[str, ...], questions: tuple[str, ...], tokens: int) -> list[list[int]]:
    """Ids of each answer; the CPU computes in f32, so that what differs is the device's."""
    pairs = ("device.reserve=1GiB", "model.context=256", "backend.activations=f32", *settings)
    model = open_model(load_config(DEMO, [Override.parse(pair) for pair in pairs]))
    found = []
    for number, question in enumerate(questions):
        prompt = model.encode_chat([{"role": "user", "content": question}])
        request = Request(str(number), prompt, SamplingParams(temperature=0.0, max_tokens=tokens))
        list(model.engine.generate(request))
        found.append(list(request.generated))
    return found


def run(emulated: bool) -> dict[str, Any]:
    """Compared with all experts on the device, and with some that come and go."""
    questions, tokens = (QUESTIONS[1:2], 3) if emulated else (QUESTIONS, 48)
    use = ("device.use=emulated", "device.kernels=cuda") if emulated else ("device.use=cuda",)
    wanted = answers(("device.use=none",), questions, tokens)
    result: dict[str, Any] = {"questions": len(questions), "tokens": tokens, "problem": ""}
    for name, more in (("all experts", ()), ("few slots", FEW_SLOTS)):
        found = answers((*use, *more), questions, tokens)
        result[name] = [a == b for a, b in zip(found, wanted, strict=True)]
        if not all(result[name]):
            result["problem"] += f"{name}: {found} instead of {wanted}\n"
    return result


if __name__ == "__main__":
    stage_main(run)
