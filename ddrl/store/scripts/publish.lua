-- fenced
-- Store a version of the weights, make it the latest, set the allowance and drop old versions.
-- KEYS: 1 state (hash), 2 weights (hash), 3 allowance (stream), 4 and 5 blob of the version and its ONNX file (strings),
--       then the two of each version to drop.
-- ARGV: 1 token, 2 version, 3 bytes, 4 blob, 5 allowance, 6 updates, 7 collectors that share the allowance,
--       8 ONNX file, or empty, then the versions to drop in the order of their keys.
-- Answer: 1.
redis.call('SET', KEYS[4], ARGV[4])
if ARGV[8] ~= '' then
  redis.call('SET', KEYS[5], ARGV[8])
end
-- `latest`, and the fields <version> = bytes, <version>:updates, and <version>:ms, the time by the server's clock.
local now = redis.call('TIME')
redis.call('HSET', KEYS[2], 'latest', ARGV[2], ARGV[2], ARGV[3], ARGV[2] .. ':updates', ARGV[6],
  ARGV[2] .. ':ms', now[1] * 1000 + math.floor(now[2] / 1000))
for i = 9, #ARGV do
  redis.call('DEL', KEYS[2 * i - 12], KEYS[2 * i - 11])
  redis.call('HDEL', KEYS[2], ARGV[i], ARGV[i] .. ':updates', ARGV[i] .. ':ms')
end
local id = redis.call('XADD', KEYS[3], 'MAXLEN', 1, '*', 'allowance', ARGV[5], 'version', ARGV[2])
note_allowed(KEYS[1], ARGV[5])
redis.call('HSET', KEYS[1], 'version', ARGV[2], 'allowance', ARGV[5], 'allowance_id', id, 'updates', ARGV[6],
  'players', ARGV[7])
return 1
