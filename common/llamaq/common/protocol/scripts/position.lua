-- Returns an upper bound on the number of waiting jobs that get a slot before a job.
--
-- The bound is exact if no job was cancelled or changed its priority while it waited, and no tenant waits. With tenants, it
-- counts the turns of the other tenants as if no running job ended, and all tenants had equally many claimed jobs.
-- Retried and interrupted jobs, and interactive jobs that are submitted later, may still get a slot first.
--
-- KEYS[1]  job          hash of the job
-- KEYS[2]  interactive  job stream of priority 'interactive'
-- KEYS[3]  bulk         job stream of priority 'bulk'
-- ARGV[1]  group        consumer group of the job streams
--
-- Returns the number; -1 if the job does not wait: it is not due, has a slot, has ended, or does not exist.

local job, group = KEYS[1], ARGV[1]
local MAX_CLAIMED, MAX_PASSED = 1000, 100
local state = redis.pcall('HMGET', job, 'status', 'priority', 'entry', 'tenant')
if state.err or state[1] ~= 'queued' or not state[3] then
  return -1
end
local entry, tenant = state[3], state[4]
local stream = state[2] == 'bulk' and KEYS[3] or KEYS[2]

-- Returns the number of waiting jobs of another stream.
local function count_waiting(other)
  return redis.call('XLEN', other) - count_running(other, group)
end

-- Returns the number of pending entries of a stream that wait for a slot in workers, and of all pending entries.
local function count_pending(other)
  local pending = redis.pcall('XPENDING', other, group)
  for _, consumer in ipairs(pending[4] or {}) do
    if consumer[1] == WAITING then
      return tonumber(consumer[2]), pending[1]
    end
  end
  return 0, pending[1] or 0
end

-- Returns the number in an entry that is claimed in the order of the stream.
local function number_of(fields)
  return fields and fields[3] == 'n' and tonumber(fields[4])
end

-- Returns the number of the first entry that has not been read in the order of the stream.
local function first_number()
  local last = '0-0'
  local groups = redis.pcall('XINFO', 'GROUPS', stream)
  for _, fields in ipairs(groups.err and {} or groups) do
    local info = {}
    for i = 1, #fields, 2 do
      info[fields[i]] = fields[i + 1]
    end
    last = info['name'] == group and info['last-delivered-id'] or last
  end
  for _, first in ipairs(redis.call('XRANGE', stream, '(' .. last, '+', 'COUNT', MAX_PASSED)) do
    if number_of(first[2]) then
      return number_of(first[2])
    end
  end
end

local n_bulk_ahead = state[2] == 'bulk' and count_waiting(KEYS[2]) or 0
local n_claimed, n_pending = count_pending(stream)
if n_pending > 0 and #redis.call('XPENDING', stream, group, entry, entry, 1) > 0 then -- the job waits in a worker
  return n_bulk_ahead + #redis.call('XPENDING', stream, group, '-', entry, MAX_CLAIMED, WAITING) - 1
end

local turns, line, shares = turn_keys(stream, tenant)
local n_turns = tonumber(redis.call('HGET', shares, '*waiting') or '0')
local n_in_order = math.max(0, redis.call('XLEN', stream) - n_pending - n_turns) -- entries in the order of the stream
local rank, n_own = tenant and redis.call('ZRANK', line, entry), 0
if rank then
  n_own = redis.call('ZCARD', line)
  if tenant == '' then
    rank, n_own = rank + n_in_order, n_own + n_in_order
  end
else
  local found = redis.call('XRANGE', stream, entry, entry)[1]
  local own, first = number_of(found and found[2]), first_number()
  rank = math.max(0, math.min(own and first and own - first or n_in_order, n_in_order - 1))
  n_own = n_in_order + redis.call('ZCARD', line)
end
local n_others, n_before = redis.call('ZCARD', turns), redis.call('ZRANK', turns, tenant or '')
if n_before then
  n_others = n_others - 1
else
  n_before = n_others -- the jobs without a tenant get their first turn at the next read
end
if tenant and tenant ~= '' and n_in_order > 0 and not redis.call('ZSCORE', turns, '') then
  n_others = n_others + 1
end
local n_between = math.min(n_turns + n_in_order - n_own, n_others * rank + n_before)
return n_bulk_ahead + n_claimed + rank + math.max(0, n_between)
