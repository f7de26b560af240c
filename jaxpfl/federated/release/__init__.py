"""The way from clients to server: charges, samples, sums, adds noise and records.

It may be imported by `hosts`, `audits` and everyone above. To trust a release, read in this order
(what nobody trusts is not needed: another process, an audit, a report):

    releaser           who may ask; charges first, records last
    query              what clients are asked, and what it may cost
    prepared_query     one query at work: cohort, keys, door
    door               has contributions summed, adds noise whose key follows from the sum
    summing            clients' contributions, clipped and summed on each device
    accumulators       how they are added up; with `federated.double_word`
    local_noise        noise that each client adds before the sum
    example_rounding   how far one example moves a float32 sum, and why
    vector             all sums as one vector, of which each device has a share
    sum_digest         a keyed hash of the sum's bits, from which the noise's key follows
    identity           everything that a release depends on
    information_flow   proves that a release tells nothing but its noisy sum; with `federated.flow`

and of `privacy`: `plan`, `participation`, `clipping`, `mechanisms`, `exact_noise`, `keys`,
`ledger`, `chain`; then `federated.clients.client`, which hands a client function its own examples,
and `federated.mesh`.
`secure_release` is another way to ask once, without an algorithm.
"""
