-- fenced
-- Record stream entries that the learner cannot use. A second call in a row with the same entries changes nothing.
-- KEYS: 1 state (hash), 2 dead (stream), 3 experience (stream). ARGV: 1 token, 2 cap, then of each: entry id, head of its
--       header, reason, delete the entry (1|0). Answer: 1.
local newest = redis.call('XREVRANGE', KEYS[2], '+', '-', 'COUNT', 1)[1]
if newest and newest[2][2] == ARGV[#ARGV - 3] then return 1 end
write_when_full(KEYS[1])
redis.call('HINCRBY', KEYS[1], 'dead', (#ARGV - 2) / 4)
for i = 3, #ARGV, 4 do
  if ARGV[i + 3] == '1' then redis.call('XDEL', KEYS[3], ARGV[i]) end
  redis.call('XADD', KEYS[2], 'MAXLEN', '~', ARGV[2], '*', 'entry', ARGV[i], 'reason', ARGV[i + 2], 'head', ARGV[i + 1])
end
return 1
