"""The trusted node: keys, encryption, nonlinear steps, and the service around them.

Importing the package loads nothing; its modules load TenSEAL and onnxruntime.
"""
