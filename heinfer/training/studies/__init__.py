"""What popular claims about private training are worth: each is tested at equal epsilon, with several seeds.

`arms` says what is trained, `claims` what is claimed about it, `verdicts` how differences are judged, `study` runs it
all within a time budget, `report` and `plots` write down what was found. The runs are seeded and not private (see
`heinfer.training.experiments`): studies are made on public data.
"""
