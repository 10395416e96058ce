"""What users ask a run over HTTP.

endpoint       the routes of a run
server         what our HTTP servers have in common: the way of a request, limits, the form of failures
guard          who may ask; tokens, which files hold; http_log, whose failures are told
openapi        what a route takes and gives
"""
