"""What a run measures: each metric described once, for people, Prometheus and Grafana.

metrics.txt, descriptions: name, unit and formula of each. exposition: the newest numbers of a run, as /metrics gives them.
grafana: a dashboard of them.
"""
