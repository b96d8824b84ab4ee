"""How much memory tensors take while code runs."""

import torch


def peak_of_call(executor, *args: torch.Tensor) -> int:
    """The most bytes that torch's allocator held at once for one call of a compiled executor."""
    executor(*args)
    with torch.profiler.profile(profile_memory=True, acc_events=True) as profile:
        executor(*args)
    held = peak = 0
    events = profile.profiler.kineto_results.events()
    for event in sorted(events, key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak
