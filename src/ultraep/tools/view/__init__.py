"""The viewer: a page on this machine that shows traces, large ones and those still being written.

    found.py     paths that the user names -> traces and reports
    store.py     arrays of pieces, read when a record is opened; a cache of the last ones
    folder.py    the records of a trace in a folder, from the summaries of its pieces
    single.py    the records of a trace in one file
    table.py     a few numbers of every record, and what the page draws of them
    record.py    one microbatch of one layer, from the pieces that hold it
    replays.py   a trace planned again, in the background
    catalogue.py all that is open, and the thread that reads
    api.py       what the page asks for, as JSON
    guard.py     who may ask: hosts, origins, tokens, sizes, times
    server.py    the application, and the server that runs it
    export.py    one HTML file in place of a server

starlette and uvicorn: pip install 'ultraep[view]'. Only guard.py, api.py, server.py import them.
"""
