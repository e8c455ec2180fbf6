"""The viewer: a page on this machine that shows traces, large ones and those still being written.

    traces.py    open traces: columns of all records, single records
    table.py     a few numbers of every record, and what the page draws of them
    record.py    one microbatch of one layer
    replays.py   a trace planned again, in the background
    catalogue.py all that is open, and the thread that reads
    api.py       what the page asks for, as JSON
    guard.py     which requests are answered: hosts, origins, tokens, sizes, times
    server.py    the application, and the server that runs it
    export.py    one HTML file in place of a server

starlette and uvicorn: pip install 'ultraep[view]'. Only guard.py, api.py, server.py import them.
"""
