"""What commands say on a terminal before they begin."""

from __future__ import annotations

from strata.config import format_size
from strata.hardware.files import format_cpu_list
from strata.hardware.profile import HardwareProfile
from strata.interfaces.terminal import note, watched
from strata.plan.plan import DraftPlan, Plan


def announce(
    plan: Plan,
    machine: HardwareProfile,
    kv_place: str,
    numa_place: str = "",
    quality: str = "",
    inputs: str = "",
) -> None:
    """The plan's summary on stderr, where that is a terminal; scripts and pipes are left in peace.

    kv_place: what memory the KV cache became. numa_place: what is bound to which memory nodes, "" = nothing.
    quality: what the model's formats cost, as it was measured. inputs: what products read, if it is special.
    """
    if not watched():
        return
    from strata.interfaces.plan_report import summary  # rich takes 60 ms

    numa = f"\nnuma     {numa_place}" if numa_place else ""
    cost = f"\nquality  {quality}" if quality else ""
    read = f"\ninputs   {inputs}" if inputs else ""
    draft = f"\ndraft    {describe_draft(plan.draft)}" if plan.draft else ""
    note(f"{summary(plan, machine)}\nkv       {kv_place}{draft}{numa}{cost}{read}")


def describe_draft(draft: DraftPlan) -> str:
    """What proposes tokens, how large it is and where it computes."""
    own = f"{len(draft.cpus)} threads of its own (CPUs {format_cpu_list(draft.cpus)})"
    return (
        f"{draft.model} proposes tokens: {format_size(draft.weights)} of weights, "
        f"{format_size(draft.nbytes)} of KV, on {own if draft.cpus else 'the threads of the model'}"
    )
