-- Functions that only scripts of the worker share. They are put in front of such a script after those of
-- `llamaq.common.protocol` (script_source.py).

-- Ends a job whose cancel was accepted, instead of a requeue: if no other worker runs, nothing would end it. The keys of its
-- events follow from the key of its hash. An error before the first write changes nothing: Redis Cluster may have moved the
-- events to another server already.
local function end_cancelled(job, stream, group, entry)
  local partition, id = parts_of_job(job)
  local events = partition .. 'events:' .. id
  redis.call('EXISTS', events) -- an error if they were moved
  end_without_worker(job, events, partition .. 'tokens:' .. id, stream, group, entry, 'cancelled')
end

-- Fails a job that no worker can run, and makes a dead letter of it.
local function bury(job, events, channel, stream, group, entry, dead, id, code, reason, workers, dead_ttl, max_dead)
  allow_writes_when_full(job)
  redis.call('HSETNX', job, 'ttl_ms', dead_ttl) -- a damaged hash may lack it
  local failed = cmsgpack.pack({type = 'failed', code = code, message = reason})
  terminate(job, events, channel, stream, group, entry, 'failed', failed, {'error', failed})
  add_dead_letter(job, events, dead, id, reason, workers, dead_ttl, max_dead)
end

-- Returns whether the newest attempt of a job has stored no token, so that the job may have crashed its worker. The arguments
-- are fields of its hash.
local function is_unproven(generated, generated_at_start)
  return generated and generated == generated_at_start
end

-- Counts a crash of the worker of this attempt, which prepared or ran the job. If the attempt stored no token, the crash is
-- also recorded against the job.
local function record_crash(job, attempt, worker, has_no_token)
  count_events(job, 'crashes', 1)
  if has_no_token then
    add_death(job, attempt, worker)
  end
end

-- Requeues all pending entries of a consumer. Returns their number.
local function requeue_entries(stream, group, consumer)
  local n_requeued = 0
  repeat
    local pending = redis.pcall('XPENDING', stream, group, '-', '+', 1000, consumer)
    for _, item in ipairs(array_or_empty(pending)) do
      local entry = unpack(item)
      requeue_entry(stream, group, entry)
      n_requeued = n_requeued + 1
    end
  until pending.err or #pending < 1000
  return n_requeued
end
