-- Claims a job for a worker. claim.lua claims jobs whose entries were taken before, and read.lua the jobs of new entries.
-- The functions use those of `_lib.lua`.
--
-- Tokens of two models are never mixed in one job. If another model has stored tokens of the job, its entry is left to
-- the workers of that model: it can be taken again after LEFT_MS. With `restart`, a job with stream=false, of which no
-- token was published, begins again with its first token, and other jobs fail.

local LEFT_MS = 2000
local MAX_CLAIMED_BYTES = 1048576 -- size of requests from which on a call claims no further job

-- Returns whether a job is still as an earlier call left it. The reply to that call was lost. If `known` is above 0, the
-- attempt `known` waits in the worker `by`. If it is 0, no worker has claimed the job.
local function is_unchanged(by, state, known)
  if known == 0 then
    return not state[12]
  end
  return state[1] == 'queued' and tonumber(state[10]) == known and state[11] == by.worker and state[12]
end

-- Returns whether an earlier call has taken the job from the attempt `from` for the worker `by`. The reply to it was lost.
local function has_moved(by, state, from)
  return tonumber(state[10]) == from + 1 and state[11] == by.worker and state[12]
end

-- Begins an attempt of a job, and returns its number. `state` has the fields that `claim_job` reads.
local function begin_attempt(by, job, state, from)
  if by.n_attempts == 0 then -- one call is enough for all later writes
    allow_writes_when_full(job) -- claimed jobs end, and that frees memory
  end
  local attempt = redis.call('HINCRBY', job, 'attempt', 1) -- an error if another client has written a wrong number
  by.n_attempts = by.n_attempts + 1
  if state[9] and state[8] ~= state[9] then
    redis.call('HDEL', job, 'crashes', 'deaths') -- the last attempt stored tokens, so earlier crashes no longer count
  elseif from ~= '' and state[12] and state[11] ~= by.worker then
    add_death(job, from, state[11])
  end
  -- The stream of an interrupted job has stopped, so the job waits only a short time for a slot of this worker. After
  -- each move, a job stays longer in its worker, so that it does not move to and fro.
  local move_factor = state[6] and 0.25 or 1
  if from ~= '' then
    move_factor = tonumber(state[20] or '1') * (state[11] == by.worker and 1 or 2)
  end
  local fields = {'status', 'queued', 'worker', by.worker, 'lease_ms', by.lease_ms, 'claimed_ms', by.now,
    'generated_at_start', state[8]}
  if state[20] or move_factor ~= 1 then
    fields[#fields + 1], fields[#fields + 2] = 'move_factor', move_factor
  end
  if by.model ~= '' and state[8] == '0' then
    fields[#fields + 1], fields[#fields + 2] = 'model', by.model
  end
  if by.at_risk then
    fields[#fields + 1], fields[#fields + 2] = 'at_risk', 1
  elseif state[12] then
    redis.call('HDEL', job, 'at_risk')
  end
  redis.call('HSET', job, unpack(fields))
  return attempt
end

-- Claims one job for the worker `by`, and returns the reply that claim.lua describes. The table `by` has the arguments
-- group, worker, lease_ms, at_risk, model and restarts of claim.lua, `now`, the time of the server in ms, `paused`, whether
-- the queue is paused, and `has_leased`, whether this call has just given the entry a lease. Two of its fields count:
-- `n_attempts` the attempts, and `n_bytes` the size of the requests.
--
-- If the reply to an earlier call was lost, `claimed` maps each entry of that call to the attempt that it has begun, or to 0
-- if it has begun none. The reply is then the same again, unless another worker has taken the job meanwhile.
local function claim_job(by, job, events, stream, entry, channel, from)
  local group, worker, model, now = by.group, by.worker, by.model, by.now
  local state = redis.call('HMGET', job,
    'status', 'entry', 'cancel', 'queue_deadline_ms', 'submitted_ms', 'started_ms', 'priority',
    'generated', 'generated_at_start', 'attempt', 'worker', 'at_risk', 'deadline_ms',
    'timeout_ms', 'slot_ms', 'model', 'waits_from_ms', 'retries_left', 'token_times', 'move_factor', 'request')
  if not state[1] then
    return {'gone'}
  end
  if has_ended(state[1]) or not is_entry_of_job(state[2], state[7], stream, entry) then
    drop_entry(stream, group, entry)
    return {'done'}
  end
  if from ~= '' and (state[1] ~= 'queued' or (tonumber(state[10]) ~= from and not has_moved(by, state, from))) then
    return {'stale'}
  end
  local known = by.claimed and by.claimed[entry]
  if known and not is_unchanged(by, state, known) then
    allow_writes_when_full(job)
    remove_death(job, known, worker) -- the worker that has taken the job counted the death of this worker
    return {'stale'}
  end
  if state[3] then
    end_without_worker(job, events, channel, stream, group, entry, 'cancelled')
    return {'ended'}
  end

  local due = due_ms('queued', state[6], state[4], state[13])
  local timeout, slot_time = tonumber(state[14] or '0'), tonumber(state[15] or '0')
  if (due and now >= due) or (timeout > 0 and slot_time >= timeout) then
    end_without_worker(job, events, channel, stream, group, entry, 'deadline')
    return {'ended'}
  end

  if not state[6] and by.paused then
    if from ~= '' then
      return {'stale'}
    end
    requeue_entry(stream, group, entry)
    return {'paused'}
  end

  if model ~= '' and state[16] and state[16] ~= model and state[8] ~= '0' then
    if not by.restarts then
      if from ~= '' then
        return {'stale'}
      end
      renew_lease(stream, group, WAITING, entry, LEFT_MS)
      return {'left'}
    end
    if cmsgpack.unpack(state[21]).stream ~= false then
      local failed = cmsgpack.pack({type = 'failed', code = 'other_model',
        message = 'another model generated the first ' .. state[8] .. ' tokens, and its workers are gone'})
      terminate(job, events, channel, stream, group, entry, 'failed', failed, {'error', failed})
      return {'ended'}
    end
    allow_writes_when_full(job)
    redis.call('DEL', events)
    redis.call('HSET', job, 'generated', 0)
    state[8] = '0'
  end

  local submitted, started = tonumber(state[17] or state[5]), tonumber(state[6] or '-1')
  local waited = now - submitted
  local attempt = (known or 0) > 0 and known or begin_attempt(by, job, state, from)
  if not by.has_leased then
    renew_lease(stream, group, WAITING, entry, by.lease_ms)
  end
  by.n_bytes = by.n_bytes + #(state[21] or '')
  return {
    'run', attempt, state[21] or '', tonumber(state[8]), waited,
    started < 0 and -1 or started - submitted, slot_time, (tonumber(state[13] or '0') > 0) and state[13] - now or -1,
    tonumber(state[18] or '-1'), state[8] ~= '0' and state[19] or '',
  }
end

