"""What the choice of draft lengths is worth, without a machine's noise.

    python scripts/replay_drafts.py MODEL
    python scripts/replay_drafts.py stores/smollm2 -n 128 --set backend.threads=2

The model writes the texts of `strata bench --speculative`. Its steps are measured with drafts of every
length that are all wrong, in turns, so that nothing slow meets one length alone. Then every policy decodes
each text again in virtual time: n-grams find what they find, and a step takes what was measured. Printed
are plain steps by the length of the draft, and tokens per plain step by policy; of what pays, by the
requests of an engine that decodes the text again and again, the first one of which knows nothing of the
model's steps.
"""

from __future__ import annotations

import argparse
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from statistics import fmean

from strata.config import Override, load_config
from strata.core import MOST_DRAFTED, Request, SamplingParams
from strata.engine.bench.speculation import POLICIES, ScriptedTokens, Workload
from strata.engine.engine import Engine
from strata.engine.metrics import Phase
from strata.engine.sampler import Sampler
from strata.engine.scheduler import Work
from strata.engine.speculative.draft_length import LengthOptions
from strata.engine.speculative.ngram import NgramProposer
from strata.engine.speculative.proposer import Ask, Proposal
from strata.engine.speculative.speculator import Speculator
from strata.interfaces.speculative_bench import SpeculativeBenchmark

LENGTHS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16)
FASTEST = 0.1
"""Of the times of each length, those that count: what disturbs steps only makes them longer."""
GREEDY = SamplingParams(temperature=0.0, max_tokens=None)
Cost = Callable[[int], float]
"""Plain steps by the rows of a step."""


class WrongDrafts(NgramProposer):
    """As many tokens as it is told, none of which is the script's."""

    length = 0

    def propose(self, asks: Sequence[Ask]) -> list[Proposal]:
        """All the same token: see `step_times`."""
        return [Proposal((1,) * min(self.length, ask.count)) for ask in asks]


class Clock:
    """Virtual time, in plain steps."""

    now = 0.0

    def __call__(self) -> float:
        """Now."""
        return self.now


def written(engine: Engine, workload: Workload, tokens: int) -> Workload:
    """With the text that the model writes, where there is no script."""
    if workload.script is not None:
        return workload
    engine.speculator = None
    request = Request("written", list(workload.prompt), SamplingParams(temperature=0.0, max_tokens=tokens))
    return Workload(workload.name, workload.prompt, list(engine.generate(request)))


def step_times(engine: Engine, steps: int) -> dict[int, float]:
    """Seconds of a step by the length of its draft, each measured `steps` times, in turns."""
    wrong = WrongDrafts()
    lengths = LengthOptions(MOST_DRAFTED, fixed=True)
    engine.speculator = Speculator(wrong, lengths, None)
    script = [0] * (steps * len(LENGTHS) + 2 * MOST_DRAFTED)
    prompt = list(range(2, 34))
    request = Request("timed", prompt, SamplingParams(temperature=0.0, max_tokens=len(script)))
    engine.add(request, ScriptedTokens(engine.options.valid_tokens, len(prompt), script))
    while not engine.step():
        pass
    found: dict[int, list[float]] = {length: [] for length in LENGTHS}
    for turn in range(steps * len(LENGTHS)):
        wrong.length = LENGTHS[turn * 5 % len(LENGTHS)]  # 5 and 13 have no common factor: each after others
        begin = time.perf_counter()
        engine.step()
        found[wrong.length].append(time.perf_counter() - begin)
    engine.abort(request.request_id)
    return {
        length: fmean(sorted(times)[: max(1, int(FASTEST * len(times)))]) for length, times in found.items()
    }


def cost_of(times: dict[int, float]) -> Cost:
    """Between the lengths that were measured in proportion; more never takes less."""
    ratios, most = [], 1.0
    for length in LENGTHS:
        most = max(most, times[length] / times[0])
        ratios.append(most)

    def cost(rows: int) -> float:
        place = bisect_left(LENGTHS, rows - 1)
        if LENGTHS[place] == rows - 1:
            return ratios[place]
        low, high = LENGTHS[place - 1], LENGTHS[place]
        return ratios[place - 1] + (ratios[place] - ratios[place - 1]) * (rows - 1 - low) / (high - low)

    return cost


def replay(
    speculator: Speculator, clock: Clock, workload: Workload, cost: Cost, name: str, asking: float = 0.0
) -> float:
    """Tokens per plain step of one request. asking: plain steps that asking about a step takes."""
    script = workload.script or ()
    text = [*workload.prompt, *script]
    request = Request(name, list(workload.prompt), GREEDY)
    request.tokens.append(script[0])
    request.computed = len(request.prompt)
    sampler, decoded, begin = Sampler(GREEDY, 1 << 30), Phase(), clock.now
    while len(request.tokens) < len(text):
        start, draft = clock.now, tuple[int, ...]()
        if not speculator.rests([request], decoded):
            clock.now += asking
            room = min(MOST_DRAFTED, len(text) - len(request.tokens) - 1)
            draft = speculator.propose([Ask(request, room, sampler)]).get(name, ())
        work = Work(request, len(request.tokens) - 1, 1 + len(draft), True, (), draft=draft)
        following = text[len(request.tokens) : len(request.tokens) + work.count]
        accepted = next(
            (i for i, (a, b) in enumerate(zip(draft, following, strict=False)) if a != b), len(draft)
        )
        request.tokens += following[: accepted + 1]
        clock.now += cost(work.count)
        decoded.add(accepted + 1, clock.now - start, 0.0)
        if speculator.asked:
            speculator.verified(work, accepted)
            speculator.measured([work], [accepted + 1])
    speculator.forget(name)
    return (len(script) - 1) / (clock.now - begin)


def replayed(workload: Workload, cost: Cost, requests: int, asking: float) -> dict[str, list[float]]:
    """By policy: tokens per plain step of each request; of fixed lengths and the rule of one."""
    found = {}
    for name, lengths, costs in POLICIES:
        if lengths is None:
            continue
        clock = Clock()
        estimate = (lambda rows, **_: 1 + 0.05 * rows) if costs else None
        speculator = Speculator(NgramProposer(), lengths, estimate, clock)
        count = requests if costs else 1
        found[name] = [replay(speculator, clock, workload, cost, str(i), asking) for i in range(count)]
    return found


def main() -> None:
    """Two tables."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("-n", "--tokens", type=int, default=256, help="of each text [256]")
    parser.add_argument("--steps", type=int, default=48, help="measured of every length [48]")
    parser.add_argument("--requests", type=int, default=4, help="of what pays, one after the other [4]")
    parser.add_argument("--asking", type=float, default=0.0, help="plain steps that choosing takes [0]")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    options = parser.parse_args()
    overrides = [Override("model.path", options.model, "MODEL"), *map(Override.parse, options.set)]
    bench = SpeculativeBenchmark(load_config(None, overrides), options.tokens)
    times = step_times(bench.engine, options.steps)
    print("| " + " | ".join(map(str, LENGTHS)) + f" | a plain one |\n|{'---|' * (len(LENGTHS) + 1)}")
    cost = cost_of(times)
    print(
        "| " + " | ".join(f"{cost(1 + length):.2f}" for length in LENGTHS) + f" | {1e3 * times[0]:.2f} ms |\n"
    )
    print("| text | fixed 4 | fixed 8 | by the rule | what pays |\n|---|---|---|---|---|", flush=True)
    for workload in bench.workloads:
        found = replayed(
            written(bench.engine, workload, options.tokens), cost, options.requests, options.asking
        )
        cells = [", ".join(f"{speed:.2f}" for speed in speeds) for speeds in found.values()]
        print(f"| {workload.name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
