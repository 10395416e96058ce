"""The dashboard: `rondo view RUN...`, runs in a browser, live or over, in a process of its own.

blocks         an index on the disk, beside what it is of
metrics        curves, thinned out                                      samples   prompts and answers, found and filtered
run            how a run is doing, from its files and its endpoint      server    routes, and who may ask
behind         the page behind a run's admin port                memory    what processes and devices hold now
assets/        the page: plain modules, and a chart library of others
"""
