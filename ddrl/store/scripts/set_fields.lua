-- fenced
-- Set fields of a hash. Works at maxmemory, since HDEL comes first: a script that began with a write that needs no
-- memory may go on with ones that do.
-- KEYS: 1 state (hash), 2 the hash to change. ARGV: 1 token, then field and value in turn. Answer: 1.
redis.call('HDEL', KEYS[2], '')
for i = 2, #ARGV, 2 do redis.call('HSET', KEYS[2], ARGV[i], ARGV[i + 1]) end
return 1
