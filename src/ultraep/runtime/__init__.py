"""Where the stages run: how the ranks of a group reach each other, and what memory they own.

`connect.connect(group)` gives the communicator of a process group: shared memory or sockets;
`local.LocalGroup` gives many ranks in one process. Nothing is imported before it is asked for.
"""
