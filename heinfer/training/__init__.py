"""From a recipe and labelled records to a released ONNX model with a card, with differential privacy or without.

    recipe, datasets        what to train, and on what; checked and immutable
    architectures           networks by name, none of which mixes records
    privacy                 accounting, budget, ledger; sampling, noise, clipping, gradients of single records
    assembly                recipe and data to a run that can take its first step
    private_trainer         the private loop; checkpoint, runs and account let it be killed and resumed
    trainer                 the loop without privacy
    export, card, page      one static ONNX file, checked against torch; what is said of it
    private_release,        all of it, written as one folder: `heinfer train`
    release
    experiments, sweep,     seeded runs: accuracy over epsilon, popular claims at equal epsilon
    studies
    auditing                epsilon bounded from below, with canaries

Needs the extra `train`, which brings torch. Nothing is imported here, so that an entry point can prepare its
environment before torch is loaded.
"""
