"""Prints the scalars and histograms that TensorBoard reads from the event files of a folder, by tag, as JSON."""
import json, sys
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
board = EventAccumulator(sys.argv[1], size_guidance={"scalars": 0, "histograms": 0})
board.Reload()
tags = board.Tags()
out = {"scalars": {}, "histograms": {}}
for tag in tags["scalars"]:
    out["scalars"][tag] = [[e.step, repr(e.value), e.wall_time] for e in board.Scalars(tag)]
for tag in tags["histograms"]:
    out["histograms"][tag] = [
        [e.step, h.min, h.max, h.num, list(h.bucket_limit), list(h.bucket)]
        for e in board.Histograms(tag) for h in [e.histogram_value]
    ]
print(json.dumps(out))
