"""The whole engine on a fake clock, over ranks whose caches hold something that can be checked.

contents.py    what a block must hold: each position is a hash over all that it depends on
timeline.py    the fake clock with its events, and the channels of the engine
rows.py        the sequences of a step as a rank takes them
touched.py     which blocks a row reads and writes, and that its window and its state are right
domains.py     what each tier of a rank holds of one type of blocks, and who is at it
computing.py   what a rank computes
ranks.py       ranks that carry out plans as workers do, and fail as they are told to
oracle.py      what a request can be spared at the most
world.py       one engine, its ranks, its clients; turn by turn or by script
invariants.py  what holds after every turn, and at the end
scripts.py     scripts: replayed, drawn at random, shrunk

Prefill and decode instances, several of them on one clock:

processes.py   the clock of several processes, and their turns
network.py     what stands in for ZeroMQ between their links
moving.py      blocks on their way between the ranks of two instances
instance.py    one instance, as a world with peers
cluster.py     all of them, killed, stopped, cut off
pd_scripts.py  their scripts
"""
