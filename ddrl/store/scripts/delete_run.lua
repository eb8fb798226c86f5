-- Delete the state of an ended run; it is remembered as deleted, so that no learner brings it back.
-- KEYS: 1 state (hash), 2 lease (string), 3 all runs (zset), 4 runs that have not ended (zset), 5 deleted runs (zset).
-- ARGV: 1 run, 2 ms for which it is remembered as deleted, then the statuses that may be deleted.
-- Answer: 1, also if it is deleted; 0 if it may not be deleted: it is leased, or was resumed since.
if redis.call('EXISTS', KEYS[1]) == 0 then return 1 end
if redis.call('EXISTS', KEYS[2]) == 1 then return 0 end
local status, may = redis.call('HGET', KEYS[1], 'status'), false
for i = 3, #ARGV do may = may or status == ARGV[i] end
if not may then return 0 end
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('DEL', KEYS[1])
redis.call('ZREM', KEYS[3], ARGV[1])
redis.call('ZREM', KEYS[4], ARGV[1])
redis.call('ZREMRANGEBYSCORE', KEYS[5], 0, now_ms - tonumber(ARGV[2]))
redis.call('ZADD', KEYS[5], now_ms, ARGV[1])
return 1
