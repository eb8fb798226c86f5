-- Release the lease if the caller holds it.
-- KEYS: 1 lease (string). ARGV: 1 token. Answer: 1, or 0 if the caller did not hold it.
if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end
return 0
