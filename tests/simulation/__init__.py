"""The whole engine on a fake clock, over ranks whose caches hold something that can be checked.

contents.py    what a block must hold: each position is a hash over all that it depends on
timeline.py    the fake clock with its events, and the channels of the engine
ranks.py       ranks that carry out plans as workers do, and fail as they are told to
world.py       one engine, its ranks, its clients; turn by turn or by script
invariants.py  what holds after every turn, and at the end
scripts.py     scripts: replayed, drawn at random, shrunk
"""
