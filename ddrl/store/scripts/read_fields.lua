-- Read fields of a hash that workers may write.
-- KEYS: 1 hash. ARGV: 1 most bytes of a value, then the fields. Answer: their values; nil for one missing or longer, or beyond 32 MB.
local values, bytes, longest = {}, 0, bound(ARGV[1], 2 ^ 14)
for i = 2, #ARGV do
  local size = redis.call('HSTRLEN', KEYS[1], ARGV[i])
  local is_read = size <= longest and bytes + size <= 2 ^ 25
  if is_read then bytes = bytes + size end
  values[i - 1] = is_read and redis.call('HGET', KEYS[1], ARGV[i])
end
return values
