-- fenced
-- Set the allowance and wake the collectors that wait for it.
-- KEYS: 1 state (hash), 2 allowance (stream of one entry). ARGV: 1 token, 2 allowance, 3 updates,
--       4 collectors that share the allowance. Answer: the id of the allowance's entry.
local version = redis.call('HGET', KEYS[1], 'version')
local id = redis.call('XADD', KEYS[2], 'MAXLEN', 1, '*', 'allowance', ARGV[2], 'version', version)
note_allowed(KEYS[1], ARGV[2])
redis.call('HSET', KEYS[1], 'allowance', ARGV[2], 'allowance_id', id, 'updates', ARGV[3], 'players', ARGV[4])
return id
