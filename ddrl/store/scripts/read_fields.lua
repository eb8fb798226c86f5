-- Read fields of a hash that workers may write.
-- KEYS: 1 hash. ARGV: 1 most bytes of a value, then the fields. Answer: their values; nil for one missing or longer.
local values = {}
for i = 2, #ARGV do
  local is_short = redis.call('HSTRLEN', KEYS[1], ARGV[i]) <= tonumber(ARGV[1])
  values[i - 1] = is_short and redis.call('HGET', KEYS[1], ARGV[i])
end
return values
