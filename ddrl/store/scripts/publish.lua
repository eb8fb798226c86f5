-- fenced
-- Store a version of the weights, make it the latest, set the allowance and drop old versions.
-- KEYS: 1 state (hash), 2 weights (hash), 3 allowance (stream), 4 blob of the version (string), then blobs to drop.
-- ARGV: 1 token, 2 version, 3 bytes, 4 blob, 5 allowance, 6 updates, 7 collectors that share the allowance, then the
--       versions to drop in the order of their keys.
-- Answer: 1.
redis.call('SET', KEYS[4], ARGV[4])
redis.call('HSET', KEYS[2], 'latest', ARGV[2], ARGV[2], ARGV[3])  -- `latest`, and field <version> = bytes
for i = 5, #KEYS do  -- KEYS[5] goes with ARGV[8]
  redis.call('DEL', KEYS[i])
  redis.call('HDEL', KEYS[2], ARGV[i + 3])
end
local id = redis.call('XADD', KEYS[3], 'MAXLEN', 1, '*', 'allowance', ARGV[5], 'version', ARGV[2])
redis.call('HSET', KEYS[1], 'version', ARGV[2], 'allowance', ARGV[5], 'allowance_id', id, 'updates', ARGV[6],
  'players', ARGV[7])
return 1
