# What `reprise.cluster.replicas` uses of Ray.
