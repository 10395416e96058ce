"""What users ask a run over HTTP.

endpoint       the routes; tokens, who may ask; http_log, what our servers' failures look like
"""
