"""The viewer: a page on this machine that shows traces, large ones and those still being written.

    found.py     paths that the user names -> traces and reports
    store.py     arrays of pieces, read when they are wanted, the last ones kept; single rows
    columns.py   what is known of every record: some numbers each, whatever the loads take
    routed.py    imbalance as routed, without reading the loads
    table.py     a moment's view of these columns, and what the page draws of it
    index.py     reads a trace piece by piece into columns: first a sample of it, then all
    single.py    the same for a trace in one file
    record.py    one microbatch of one layer, from the pieces that hold it
    replays.py   a trace planned again, in the background
    catalogue.py all that is open, and the thread that reads
    api.py       what the page asks for, as JSON
    guard.py     who may ask: hosts, origins, tokens, sizes, times
    server.py    the application, and the server that runs it
    export.py    one HTML file in place of a server

starlette and uvicorn: pip install 'ultraep[view]'. Only guard.py, api.py, server.py import them.
"""
