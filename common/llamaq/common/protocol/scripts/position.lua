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

local job, interactive, bulk, group = KEYS[1], KEYS[2], KEYS[3], ARGV[1]
local MAX_CLAIMED, MAX_PASSED = 1000, 100
local status, priority, entry, tenant = fields_if_hash(job, 'status', 'priority', 'entry', 'tenant')
if status ~= 'queued' or not entry then
  return -1
end
local stream = priority == 'bulk' and bulk or interactive

-- Returns the number of waiting jobs of another stream.
local function count_waiting(other)
  return redis.call('XLEN', other) - count_running(other, group)
end

-- Returns the number of pending entries of a stream that wait for a slot in workers, and of all pending entries.
local function count_pending(other)
  local n_pending, consumers = pending_by_consumer(other, group)
  for _, pair in ipairs(consumers) do
    local consumer, n_waiting = unpack(pair)
    if consumer == WAITING then
      return tonumber(n_waiting), n_pending
    end
  end
  return 0, n_pending
end

-- Returns the number of the first entry that has not been read in the order of the stream.
local function first_number()
  local last = '0-0'
  local groups = redis.pcall('XINFO', 'GROUPS', stream)
  for _, list in ipairs(array_or_empty(groups)) do
    local info = by_name(list)
    last = info['name'] == group and info['last-delivered-id'] or last
  end
  for _, unread in ipairs(redis.call('XRANGE', stream, '(' .. last, '+', 'COUNT', MAX_PASSED)) do
    local _, fields = unpack(unread)
    local number = number_in(fields)
    if number then
      return number
    end
  end
end

local n_interactive = priority == 'bulk' and count_waiting(interactive) or 0 -- all of them get a slot before a bulk job
local n_claimed, n_pending = count_pending(stream)
if n_pending > 0 and is_pending(stream, group, entry) then -- the job waits in a worker
  return n_interactive + #redis.call('XPENDING', stream, group, '-', entry, MAX_CLAIMED, WAITING) - 1
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
  local own, first = number_in(fields_of_entry(stream, entry) or {}), first_number()
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
return n_interactive + n_claimed + rank + math.max(0, n_between)
