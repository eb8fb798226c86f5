-- Runs before every script, whose own KEYS and ARGV it leaves alone. Workers may write anything into some keys, also
-- without a script: what cannot be read there is as if it were missing.

-- The settings of cjson and of the garbage collector are the server's, and any script may change them: the defaults.
cjson.encode_number_precision(14)
cjson.encode_max_depth(1000)
cjson.decode_max_depth(1000)
cjson.encode_sparse_array(false, 2, 10)
cjson.encode_invalid_numbers(false)
cjson.decode_invalid_numbers(true)
collectgarbage('restart')
collectgarbage('setpause', 200)
collectgarbage('setstepmul', 200)

-- A number as integers are exact up to, else nil: not nan, nor inf.
local function number(value)
  local found = tonumber(value or nil)
  if found and math.abs(found) <= 2 ^ 53 then return found end
end

-- The table of a JSON object or list, else nil.
local function decode(value)
  local is_json, found = pcall(cjson.decode, value)
  if is_json and type(found) == 'table' then return found end
end

local function increase(key, field, by)
  redis.call('HSET', key, field, (number(redis.call('HGET', key, field)) or 0) + by)
end

-- XADD; nil if the stream has no ids left, until lower_ids.lua.
local function add(...)
  local id = redis.pcall('XADD', ...)
  if type(id) == 'string' then return id end
  if not string.find(id.err, 'exhausted') then return redis.call('XADD', ...) end
end

-- The same with a cap, which holds again after one call, however many entries there are.
local function add_capped(key, length, ...)
  return add(key, 'MAXLEN', '~', length, 'LIMIT', 0, '*', ...)
end
