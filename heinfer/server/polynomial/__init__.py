"""Evaluate deep blocks: layers and polynomials on ciphertexts, without asking the node in between.

    ciphertexts of inputs --(layer: W x mod every prime)--> --(polynomial: SEAL)--> --(sums)--> ... --> outputs

Linear maps are ours, on residues, exact (`heinfer.ring.chain`); products of ciphertexts, relinearisation and rescaling
are SEAL's. Both see the same arrays: SEAL keeps ciphertexts transformed, and a linear map of polynomials acts on their
transforms alike. A constant has the same transform everywhere, so adding a bias is adding one residue.

| module | what it is about |
|---|---|
| `arithmetic` | ciphertexts: the one module of the server that imports SEAL; no key but those that relinearise |
| `matrices` | the sparse integer matrix of a layer, and products of some of its rows |
| `units` | in which order layers run, and cut into which pieces |
| `running` | one unit: a layer, its activation, the sum that follows |
| `files` | ciphertexts in files, and the room that they have on the disk |
| `processes` | processes that run units, and stay between requests |
| `evaluator` | a whole block |
| `resources` | what all requests of a server share |

Memory. A ciphertext takes up to 10 MB, and the first activations of a LeNet-5 would take 47 GB. So a layer, its
activation and the sum that reads it alone (pooling) run unit by unit, down to the sums, which are kept in a file that
the system may page out. The peak follows

    workers * (150 MB of programs + weights of the block + twice the keys) + UNIT_BYTES + READ_BYTES

where a worker's part of UNIT_BYTES holds one row, or the rows of one sum, if they are larger, and its part of
READ_BYTES `LEAST_READ` coefficients of all columns that its rows read: 240 MB for 15,000 columns. Workers keep
what they have grown to until they end, `heinfer.server.polynomial.processes.KEEP_S` seconds after a request.

Products are relinearised when they are rescaled, and rescaled when they are summed up: pooling four squares costs one
relinearisation, not four. These, and SEAL's compression of what it saves, are most of the work.
"""
